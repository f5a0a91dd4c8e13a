"""What setup.cfg cannot say: links into the tree and figures lead nowhere on an index's page, so it shows neither."""

import re
from pathlib import Path

from setuptools import setup

readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", readme)
text = re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)
note = "\nThis is the README of the source tree, which has the pages and figures that it speaks of.\n"

setup(long_description=text + note)
