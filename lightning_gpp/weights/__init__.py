"""Weight versions and prediction for pipelines that do not drain; tensor arithmetic only.

``last_steps`` says what an optimizer's last update did; ``policies`` say with which weights
forwards and backwards run (PipeOptim and those it is compared with); ``versions`` keeps what a
policy needs for the parameters of a stage, and lets a backward meet other weights than its forward.
"""
