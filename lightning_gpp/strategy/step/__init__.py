"""The life of a step: who runs the user's code, who follows, and what stands in for the forward."""
