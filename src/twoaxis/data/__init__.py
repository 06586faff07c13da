"""The data room: corpora, tokenisers, token files, and loading that resumes exactly. It knows no model.

corpus = load_corpus("shakespeare")               # or a UTF-8 file or folder; NAME/valid is one split
tokenizer = load_tokenizer("byte")                # or "bpe:4096" trained on corpus.train, or a saved folder
train, valid = prepare(corpus, tokenizer)         # memory-mapped token files, cached
check_vocab(train, model_vocab_size)
loader = Loader(train, seq_len=256, batch_size=16, seed=0)
tokens, targets, segments = next(loader)          # endless; loader.state_dict() is plain data
for batch in eval_batches(valid, 256, 16): ...    # each token once; valid.bits_per_byte(nats, n_targets)
"""

from twoaxis.data.cache import cache_folder, prepare
from twoaxis.data.corpora import CORPORA, Corpus, load_corpus
from twoaxis.data.loader import Loader
from twoaxis.data.rows import Batch, eval_batches, n_windows
from twoaxis.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from twoaxis.data.tokens import TokenFile, check_vocab, tokenize

__all__ = [
    "CORPORA",
    "BPETokenizer",
    "Batch",
    "ByteTokenizer",
    "Corpus",
    "Loader",
    "TokenFile",
    "Tokenizer",
    "cache_folder",
    "check_vocab",
    "eval_batches",
    "load_corpus",
    "load_tokenizer",
    "n_windows",
    "prepare",
    "tokenize",
    "train_bpe",
]
