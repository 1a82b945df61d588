from .mlflow.plugin import MLflow as MLflow
from .open_telemetry.plugin import OpenTelemetry as OpenTelemetry
from .trackio import Trackio as Trackio
from .wandb import WandB as WandB
