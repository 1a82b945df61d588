from .callback import HeliographCallback as HeliographCallback
from .plugin import from_lightning as from_lightning
