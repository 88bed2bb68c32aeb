"""Everything in which devices differ; vendors are named only here, in doctor and in engine adapters."""
