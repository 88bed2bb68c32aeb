"""Programs that a model wrote, run where they can harm nothing."""
