from .mlflow.plugin import MLflow as MLflow
from .open_telemetry.plugin import OpenTelemetry as OpenTelemetry
from .profile.plugin import Profile as Profile
from .trackio import Trackio as Trackio
from .wandb import WandB as WandB
