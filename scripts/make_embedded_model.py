"""Make the model shipped in the package: `src/tepo/assets/embedded/`.

    python scripts/make_embedded_model.py [--output FOLDER] [--seed N]

A small Llama whose tokens are characters is trained from scratch, supervised, on worked additions of three-digit
numbers drawn from the training pairs of `tepo.data.arithmetic` (it never sees a held-out pair). Every decision of a
demonstration may slip: a carry is forgotten or invented, or a digit sum is off by one, with the probabilities below;
the working then goes on consistently to a wrong answer. So 58 % of the demonstrations contain a slip, and
the model copies the habit: it can add, but errs where a token decides. That is what reinforcement learning then cures.

Writes a plain Hugging Face folder (config, generation config, safetensors, tokenizer) and prints the accuracy on
held-out problems, sampled at temperature 1.0 and greedy. Takes about a minute and a half on two idle cores.
"""

import argparse
import random
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, get_cosine_schedule_with_warmup

from tepo.data import arithmetic
from tepo.data.problem import Problem

DIGITS = 3
CARRY_FORGOTTEN = 0.18  # probabilities of a slip, one for each kind of decision
CARRY_FORGOTTEN_AGAIN = 0.65  # a carry right after a carry: forgotten more often than not, so greedy decoding errs too
CARRY_INVENTED = 0.12
SUM_OFF_BY_ONE = 0.13
STEPS = 700
BATCH = 64
LEARNING_RATE = 2e-3
WARMUP_STEPS = 60
MAX_RESPONSE_TOKENS = 40
THREADS = 2
DEFAULT_OUTPUT = Path(__file__).resolve().parent.parent / "src" / "tepo" / "assets" / "embedded"

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
VOCABULARY = [PAD, EOS, UNK, arithmetic.ANSWER_MARK, *"0123456789", "+", "=", " "]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, `####` one token; nothing is added to a prompt."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{arithmetic.ANSWER_MARK}|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=256,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def build_model(width: int = 128, layers: int = 4, heads: int = 4) -> LlamaForCausalLM:
    """A Llama of about 0.8 million parameters with random weights (torch's global generator)."""
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=VOCABULARY.index(PAD),
        eos_token_id=VOCABULARY.index(EOS),
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def demonstration(a: int, b: int, rng: random.Random) -> str:
    """A worked response in which every decision may slip; the working goes on consistently after a slip."""
    words, digits, carry, carried_before = [], "", 0, 0
    for column in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**column % 10, b // 10**column % 10
        if column and rng.random() < _carry_slip(carry, carried_before):
            carry = 1 - carry
        total = x + y + carry
        if rng.random() < SUM_OFF_BY_ONE:
            total = 1 if total == 0 else total + rng.choice((-1, 1))
        words.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        digits = str(total % 10) + digits
        carry, carried_before = total // 10, carry
    return f"{' '.join(words)} {arithmetic.ANSWER_MARK}{'1' if carry else ''}{digits}"


def _carry_slip(due: int, carried_before: int) -> float:
    if not due:
        return CARRY_INVENTED
    return CARRY_FORGOTTEN_AGAIN if carried_before else CARRY_FORGOTTEN


def training_batch(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels [BATCH, length]; prompt and padding have the label -100."""
    total, held_out = arithmetic.count_pairs(DIGITS), arithmetic.count_held_out(DIGITS)
    texts = []
    for _ in range(BATCH):
        a, b = arithmetic.pair(rng.randrange(held_out, total), DIGITS)
        if rng.random() < 0.5:
            a, b = b, a
        texts.append(arithmetic.prompt(a, b) + demonstration(a, b, rng) + EOS)
    encoded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    labels = encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)
    labels[:, : len(arithmetic.prompt(10**DIGITS - 1, 10**DIGITS - 1))] = -100
    return encoded["input_ids"], labels


def warm_start(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Supervised training on demonstrations with slips, in place."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP_STEPS, STEPS)
    model.train()
    for step in range(1, STEPS + 1):
        ids, labels = training_batch(tokenizer, rng)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}/{STEPS}  loss {loss.item():.4f}", flush=True)
    model.eval()


@torch.no_grad()
def accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], sample: bool
) -> float:
    """Share of the problems whose response ends and has the right answer; sampled at temperature 1.0 or greedy."""
    ids = tokenizer([problem.text for problem in problems], return_tensors="pt")["input_ids"]
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_RESPONSE_TOKENS, **how)
    responses = tokenizer.batch_decode(out[:, ids.shape[1] :])
    ends = [f"{arithmetic.ANSWER_MARK}{problem.answer}{EOS}" for problem in problems]
    return sum(end in response for end, response in zip(ends, responses, strict=True)) / len(problems)


def slip_share(count: int = 20_000) -> float:
    """Share of demonstrations that contain a slip, counted over this many random ones."""
    rng = random.Random(0)
    slips = 0
    for _ in range(count):
        a, b = arithmetic.pair(rng.randrange(arithmetic.count_pairs(DIGITS)), DIGITS)
        slips += demonstration(a, b, rng) != arithmetic.worked_response(a, b)
    return slips / count


def main() -> None:
    """Train, save, and print what the model can do."""
    parser = argparse.ArgumentParser(description="Make the model shipped in the package.")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    started = time.monotonic()
    torch.set_num_threads(THREADS)
    torch.manual_seed(arguments.seed)
    tokenizer, model = build_tokenizer(), build_model()
    print(f"{model.num_parameters():,} parameters; {slip_share():.1%} of the demonstrations contain a slip")
    warm_start(model, tokenizer, arguments.seed)
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    (arguments.output / "model.safetensors").chmod(0o644)  # safetensors writes it for the owner alone

    _, problems = arithmetic.generate(arguments.seed, DIGITS, train=0, test=1000)
    sampled, greedy = (accuracy(model, tokenizer, problems, sample) for sample in (True, False))
    print(f"held-out accuracy: {sampled:.1%} sampled at temperature 1.0, {greedy:.1%} greedy")
    print(f"{arguments.output} written in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
