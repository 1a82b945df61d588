from .plugin import Optuna as Optuna
from .study import open_study as open_study
