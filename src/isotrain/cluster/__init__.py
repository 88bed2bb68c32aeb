"""Ray: joining a cluster, placing work on its devices, groups of workers."""
