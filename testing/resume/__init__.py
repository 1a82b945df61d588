"""Check that a training which is killed and resumed equals an uninterrupted one."""

from .check import assert_resume_exact, check_resume
from .errors import UsageError
from .report import InterruptedAttempt, ResumeCheck

__all__ = ["InterruptedAttempt", "ResumeCheck", "UsageError", "assert_resume_exact", "check_resume"]
