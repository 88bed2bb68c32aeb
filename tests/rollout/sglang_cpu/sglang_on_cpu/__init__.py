"""What the published wheel of SGLang needs to serve on a processor."""
