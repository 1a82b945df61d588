from .check import ChaosReport as ChaosReport
from .check import check_function as check_function
from .check import check_script as check_script
from .fault import Fault as Fault
from .plugin import Chaos as Chaos
