# SPDX-License-Identifier: Apache-2.0
"""Settings of the documentation."""

project = "HiSparse for JAX"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
napoleon_use_ivar = True
html_theme = "furo"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_member_order = "bysource"
suppress_warnings = ["autodoc.mocked_object"]
