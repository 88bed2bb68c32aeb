"""Online reinforcement learning: one controller, and the workers that it leads."""
