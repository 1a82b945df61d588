from .csv_log import CSVLog as CSVLog
from .mlflow import MLflow as MLflow
from .open_telemetry import OpenTelemetry as OpenTelemetry
from .profile import Profile as Profile
from .trackio import Trackio as Trackio
from .wandb import WandB as WandB
