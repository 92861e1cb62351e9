"""Models and data of each family, importable as ``lightning_gpp.recipes``.

A recipe is an ordinary LightningModule with an ordinary LightningDataModule: none of them knows
that it may be trained as a pipeline. The console command ``graphpipe`` puts them together.
"""
