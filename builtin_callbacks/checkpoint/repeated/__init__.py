"""The steps that a resumed run does again, compared with those of the run that was killed."""
