"""Checks that a training that is killed and resumed equals an uninterrupted one."""

from .check import InterruptedAttempt, ResumeCheck, assert_resume_exact, check_resume

__all__ = ["InterruptedAttempt", "ResumeCheck", "assert_resume_exact", "check_resume"]
