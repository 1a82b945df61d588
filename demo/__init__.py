"""The main job: a real classifier on real images, in one command."""
