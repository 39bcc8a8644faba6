"""Conversations and question-answer pairs for language models; only the answers are learned.

Everything is shared with families whose conversations hold more than text. Must not know files or ranks.
"""

from __future__ import annotations

from fullshard.text.chat import ChatEncoder


class Chat(ChatEncoder):
    """Conversations and question-answer pairs."""


__all__ = ["Chat"]
