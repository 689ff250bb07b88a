"""`pytest --nbmake notebooks` runs the .ipynb files; the .py beside each is its text to edit."""

collect_ignore_glob = ["*.py"]
