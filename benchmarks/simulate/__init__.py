"""A discrete-event simulator of online RL steps; nothing here needs torch or a device."""
