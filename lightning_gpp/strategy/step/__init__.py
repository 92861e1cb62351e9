"""The life of a step: leading, following, and the replaced forward."""
