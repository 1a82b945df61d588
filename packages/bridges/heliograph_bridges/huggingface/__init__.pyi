from .callbacks.from_huggingface import from_huggingface as from_huggingface
from .trainers.callback import HeliographCallback as HeliographCallback
