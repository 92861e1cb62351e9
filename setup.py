"""Lists the packages; everything else stands in pyproject.toml.

``recipes`` and ``configs`` are folders of their own in the source tree and parts of the package
``lightning_gpp`` once installed. Setuptools' automatic discovery cannot rename folders.
"""

from setuptools import find_namespace_packages, find_packages, setup

RENAMED = {"recipes": "lightning_gpp.recipes", "configs": "lightning_gpp.configs"}

packages = find_packages(include=["lightning_gpp", "lightning_gpp.*"])
for folder, package in RENAMED.items():
    found = find_packages(include=[folder, f"{folder}.*"])
    packages += [package + name.removeprefix(folder) for name in found]

# Hydra's namespace for plug-ins, without __init__.py, as other distributions live there too. Named
# itself beside what is in it, it gets a real folder in editable installs, which Hydra can list.
packages += find_namespace_packages(include=["hydra_plugins", "hydra_plugins.*"])

setup(packages=packages, package_dir={package: folder for folder, package in RENAMED.items()})
