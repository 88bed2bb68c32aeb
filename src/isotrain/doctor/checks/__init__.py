"""What a rule's plain conditions cannot say: one file per topic, each a generator of findings."""
