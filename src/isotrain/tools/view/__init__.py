"""`isotrain view`: curves and recorded trajectories of a run in the browser; no torch."""
