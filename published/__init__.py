"""Drafters that come with specctl: one package folder each, named as `--draft` takes it.

`specctl export RUN --publish NAME` writes one; `specctl.recipes.published` finds them.
"""
