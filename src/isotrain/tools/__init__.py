"""Tools beside training: they read recipes and run directories, and training never imports them."""
