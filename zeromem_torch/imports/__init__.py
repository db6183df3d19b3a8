"""Files of conversations as traces: exports of ours, ChatGPT's and Claude's, OpenAI messages, plain text."""

from zeromem_torch.imports.chat import DATES, FORMATS, Chat, stem
from zeromem_torch.imports.reading import read_chat

__all__ = ["DATES", "FORMATS", "Chat", "read_chat", "stem"]
