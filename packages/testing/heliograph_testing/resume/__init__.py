"""Checks that a training that is killed and resumed equals an uninterrupted one."""

from .check import assert_resume_exact, check_resume
from .report import InterruptedAttempt, ResumeCheck

__all__ = ["InterruptedAttempt", "ResumeCheck", "assert_resume_exact", "check_resume"]
