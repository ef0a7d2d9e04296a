"""BERT (Devlin et al., 2019) as it is pre-trained: masked words and next sentences, 64 words a sequence.

The vocabulary of 30522 is padded to 30528, a multiple of 8. The output matrix is the embedding's: its gradient is
complete when backpropagation reaches the embeddings, so it is one of theirs.
"""

from __future__ import annotations

from paceline.bench.training.architectures.layers import Layer, Stack

_VOCABULARY = 30528
_POSITIONS = 512
_WORDS = 64


def bert_base() -> list[Layer]:
    """12 layers of width 768."""
    return _bert(12, 768)


def bert_large() -> list[Layer]:
    """24 layers of width 1024."""
    return _bert(24, 1024)


def _bert(num_layers: int, width: int) -> list[Layer]:
    tables = ((_VOCABULARY, width), (_POSITIONS, width), (2, width))
    stack = Stack([Layer("embeddings", tables, float(_WORDS * width))])  # looking up is adding, once a word
    stack.norm(width)
    attention = float(_WORDS * _WORDS * width)  # of one of its two products
    for number in range(num_layers):
        for name in ("query", "key", "value", "output"):
            stack.linear(f"layer{number}.{name}", width, width, _WORDS)
            if name == "value":
                last = stack.layers[-1]
                stack.layers[-1] = Layer(last.name, last.shapes, last.multiply_adds + 2 * attention)
        stack.norm(width)
        stack.linear(f"layer{number}.expand", width, 4 * width, _WORDS)
        stack.linear(f"layer{number}.contract", 4 * width, width, _WORDS)
        stack.norm(width)
    stack.linear("pooler", width, width)
    stack.linear("words.transform", width, width, _WORDS)
    stack.norm(width)
    stack.layers.append(Layer("words.decoder", ((_VOCABULARY,),), float(_WORDS * width * _VOCABULARY)))
    stack.linear("next_sentence", width, 2)
    return stack.layers
