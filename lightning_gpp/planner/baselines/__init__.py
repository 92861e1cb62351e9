"""PipeDream and Piper, the baselines of the GraphPipe paper."""
