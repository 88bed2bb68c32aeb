"""From facts about a machine to findings and fixes; this process never imports torch."""
