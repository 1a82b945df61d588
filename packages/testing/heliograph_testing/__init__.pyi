from .conformance.rules import check_plugin as check_plugin
from .conformance.trackers import check_tracker as check_tracker
from .resume.check import ResumeCheck as ResumeCheck
from .resume.check import assert_resume_exact as assert_resume_exact
from .resume.check import check_resume as check_resume
