"""What the tests of the site share: what people look for, and where they should find it."""

import tomllib

from tests import ROOT

FILE = ROOT / "tests" / "system" / "site_questions.toml"
QUESTIONS = tomllib.loads(FILE.read_text(encoding="utf-8"))["question"]
