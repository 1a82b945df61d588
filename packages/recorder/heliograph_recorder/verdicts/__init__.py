"""Where the time of a run goes: measured in a training, judged there and in its recording."""
