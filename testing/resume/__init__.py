"""Is a run that was killed again and again equal to one that was left alone?"""

from .check import assert_resume_exact, check_resume
from .errors import UsageError
from .report import InterruptedLeg, ResumeCheck

__all__ = ["InterruptedLeg", "ResumeCheck", "UsageError", "assert_resume_exact", "check_resume"]
