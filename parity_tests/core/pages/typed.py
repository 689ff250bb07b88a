"""The site's search, by the theme's own script: what a reader sees first for what he types."""

import json
from pathlib import Path
from typing import Any

import quickjs

# The script runs in a worker of a browser: it listens to messages, and posts its answers.
WORKER = """
var self = globalThis, answers = [], listener;
var console = {warn() {}, log() {}, error() {}};
self.addEventListener = (kind, called) => { if (kind == "message") listener = called };
self.postMessage = (answer) => answers.push(answer);
"""
SETUP, QUERY = 0, 2  # kinds of messages


class Search:
    """Answers as the search box of a built site does."""

    def __init__(self, site: Path) -> None:
        self.script = quickjs.Context()
        self.script.eval(WORKER)
        (worker,) = site.glob("assets/javascripts/workers/search.*.min.js")
        self.script.eval(worker.read_text("utf-8"))
        index = json.loads((site / "search/search_index.json").read_text("utf-8"))
        self.rank = {section["location"]: section["boost"] for section in index["docs"]}
        self._send(SETUP, {**index, "options": {"suggest": False}})

    def pages(self, words: str) -> list[str]:
        """Locations, best first: of each page the section that fits best."""
        (answer,) = self._send(QUERY, words)
        best = (max(page, key=lambda part: part["score"]) for page in answer["data"]["items"])
        return [part["location"] for part in best]

    def _send(self, kind: int, data: Any) -> list[Any]:
        message = json.dumps({"data": {"type": kind, "data": data}})
        self.script.eval(f"answers.length = 0; listener({message}); undefined")
        while self.script.execute_pending_job():
            pass
        return json.loads(self.script.eval("JSON.stringify(answers)"))
