"""The Trainer of Hugging Face: its callbacks in our loop, our plugins in its loop."""

from .trainers.callback import HeliographCallback as HeliographCallback
