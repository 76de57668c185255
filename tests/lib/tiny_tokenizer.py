"""A tokenizer of 80 tokens, made by the library tokenizers: bytes, and a few frequent pairs."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXT = "the cat sat on the mat and the dog ate the hat é"


def write_tokenizer(folder, vocabulary=80):
    """Write tokenizer.json; <s> begins every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    filler = 0
    while tokenizer.get_vocab_size() < vocabulary:  # so that every token of a model has a text
        tokenizer.add_tokens([f"~{filler}"])
        filler += 1
    first = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", first)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
