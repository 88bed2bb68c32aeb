"""The training loops, each short enough to read in one go."""
