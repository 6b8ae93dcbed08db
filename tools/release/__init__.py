"""Makes a release: builds an sdist and wheels, looks at them, installs each into an empty environment, tries it there.

`python -m tools.release` does all of that (CONTRIBUTING.md says how a release is made); `--publish` uploads the result.
"""
