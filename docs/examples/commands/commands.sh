#!/bin/sh
# What the commands show of a training, one after the other: sh docs/examples/commands/commands.sh
# It writes to runs/ in the current folder; a second start makes a second recording there.
set -eu
here=$(dirname "$0")
heliograph="${PYTHON:-python} -m heliograph"

# Which plugins are installed, and what each does.
$heliograph plugins

# Train without the bar, and measure the time in every handler: the program is not changed.
$heliograph run --disable progress --enable handler_times "$here/digits.py"

# How the run ended, who asked for what and why, and where the time went.
$heliograph explain runs/digits

# What a patience of 1 would have done in the same run, without training again.
$heliograph replay runs/digits --plugin early_stopping:monitor=validation/loss,patience=1

# The curves, decisions and checkpoints on one page: open runs/digits.html in a browser.
$heliograph timeline runs/digits --output runs/digits.html

# The checkpoints; then every byte of them against its digest.
$heliograph checkpoint inspect runs/digits
$heliograph checkpoint verify runs/digits

# The weights of the best one, for others.
$heliograph checkpoint export runs/digits runs/digits.safetensors --which best --force

# Kill this training at three points, resume it, and compare every bit with an uninterrupted one.
PYTHONPATH="$here" $heliograph verify-resume digits:make
