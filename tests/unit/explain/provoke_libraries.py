"""Real errors of models, tokenizers, files and the machine. Each function is named after its entry."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.unit.explain.provoke_precision import heard


def orig_mod_keys() -> None:
    model = nn.Linear(2, 2)
    model.load_state_dict(torch.compile(nn.Linear(2, 2)).state_dict())  # type: ignore[attr-defined]


def size_mismatch__torch() -> None:
    nn.Linear(2, 2).load_state_dict(nn.Linear(3, 2).state_dict())


def size_mismatch__transformers(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.small import model_folder

    model_folder(folder)
    config = AutoConfig.from_pretrained(folder)
    config.intermediate_size = 64
    AutoModelForCausalLM.from_pretrained(folder, config=config)


def state_dict_keys__torch() -> None:
    nn.Linear(2, 2).load_state_dict({"other": torch.ones(2)})


def state_dict_keys__distributed_checkpoint(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": {"a": torch.ones(2)}}, checkpoint_id=folder, no_dist=True)
    dcp.load({"model": {"b": torch.ones(2)}}, checkpoint_id=folder, no_dist=True)


def optimizer_state_missing(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    weights = {"a": torch.ones(2)}
    dcp.save({"model": weights}, checkpoint_id=folder, no_dist=True)
    moments = {"state": {"a": {"exp_avg": torch.ones(2)}}}
    dcp.load({"model": weights, "optim": moments}, checkpoint_id=folder, no_dist=True)


def no_loss_returned(folder: Path) -> None:
    from transformers import Trainer, TrainingArguments

    class Headless(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return {"logits": super().forward(x)}

    trainer = Trainer(Headless(2, 2), TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[]))
    trainer.compute_loss(trainer.model, {"x": torch.ones(1, 2)})


def rope_scaling() -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    small: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 10}
    AutoModelForCausalLM.from_config(LlamaConfig(**small, num_attention_heads=2, rope_scaling={"type": "linear"}))


def cuda_library_missing() -> None:
    ctypes.CDLL("libcudart.so.12")


def cuda_library_missing__cublas() -> None:
    ctypes.CDLL("libcublasLt.so.12")


def bitsandbytes_missing(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from tests.small import model_folder

    model_folder(folder)
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True))


def weights_only(folder: Path) -> None:
    torch.save({"config": Path("a")}, folder / "model.pt")
    torch.load(folder / "model.pt")


def torch_file_broken(folder: Path) -> None:
    torch.save({"a": torch.ones(1000)}, folder / "model.pt")
    content = (folder / "model.pt").read_bytes()
    (folder / "model.pt").write_bytes(content[: len(content) // 2])
    torch.load(folder / "model.pt")


def safetensors_broken__truncated(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file({"a": torch.ones(100)}, folder / "model.safetensors")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])
    load_file(folder / "model.safetensors")


def safetensors_broken__pointer(folder: Path) -> None:
    from safetensors.torch import load_file

    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    load_file(folder / "model.safetensors")


def safetensors_shared_tensors(folder: Path) -> None:
    from safetensors.torch import save_file

    weight = torch.ones(4)
    save_file({"a": weight, "b": weight}, folder / "model.safetensors")


def hub_offline__transformers() -> None:
    from transformers import AutoConfig

    AutoConfig.from_pretrained("some-organisation/some-model")


def hub_offline__hub() -> None:
    from huggingface_hub import snapshot_download

    snapshot_download("some-organisation/some-model")


def hub_access__gated() -> None:
    _answered(403, "GatedRepo", "Access to model some/model is restricted.")


def hub_access__not_found() -> None:
    _answered(401, "RepoNotFound", "Repository not found")


def _answered(status: int, code: str, message: str) -> None:
    """The hub's answer, made here: the library's own words for it are real, the server is not asked."""
    from huggingface_hub.utils import _http, hf_raise_for_status

    http: Any = next(getattr(_http, name) for name in ("httpx2", "httpx") if hasattr(_http, name))
    request = http.Request("GET", "https://huggingface.co/api/models/some/model")
    headers = {"X-Error-Code": code, "X-Error-Message": message}
    hf_raise_for_status(http.Response(status, headers=headers, request=request))


def unknown_model_type(folder: Path) -> None:
    from transformers import AutoConfig

    (folder / "config.json").write_text('{"model_type": "no_such_model"}')
    AutoConfig.from_pretrained(folder)


def remote_code(folder: Path) -> None:
    from transformers import AutoConfig

    (folder / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.MyConfig"}}')
    (folder / "mine.py").write_text("class MyConfig: ...\n")
    AutoConfig.from_pretrained(folder, trust_remote_code=False)


def lora_targets() -> None:
    from peft import LoraConfig, get_peft_model

    get_peft_model(nn.Sequential(nn.Linear(2, 2)), LoraConfig(target_modules=["q_proj"]))


def no_pad_token() -> None:
    _tokenizer()(["a", "a b"], padding=True)


def ragged_batch__tokenizer() -> None:
    _tokenizer(pad_token="b")(["a", "a b"], return_tensors="pt")


def ragged_batch__loader() -> None:
    from torch.utils.data import default_collate

    default_collate([torch.ones(2), torch.ones(3)])


def no_chat_template() -> None:
    _tokenizer().apply_chat_template([{"role": "user", "content": "a"}])


def tokenizer_broken__transformers(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast.from_pretrained(_cut_short(folder))


def tokenizer_broken__tokenizers(folder: Path) -> None:
    from tokenizers import Tokenizer

    Tokenizer.from_file(str(_cut_short(folder) / "tokenizer.json"))


def _cut_short(folder: Path) -> Path:
    _tokenizer().save_pretrained(folder)
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text()[:200])
    return folder


def sequence_too_long() -> str:
    with heard("transformers") as log:
        _tokenizer(model_max_length=2)("a b a b")
    return log.getvalue()


def _tokenizer(**settings: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, **settings)


def index_out_of_range__embedding() -> None:
    nn.Embedding(4, 2)(torch.tensor([4]))


def index_out_of_range__label() -> None:
    nn.functional.cross_entropy(torch.zeros(1, 4), torch.tensor([4]))


def flash_attention_missing() -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention_2", dtype=torch.bfloat16)


def not_flash_attention() -> str:
    """No library says this, but model code that comes with checkpoints (Phi-3, Phi-4-multimodal), by this logger."""
    from transformers.utils import logging as transformers_logging

    with heard("transformers") as log:
        transformers_logging.get_logger("transformers.remote").warning(
            "You are not running the flash-attention implementation, expect numerical differences."
        )
    return log.getvalue()


def no_module() -> None:
    import lightning  # noqa: F401


def loader_worker_died__killed() -> None:
    _read_with_worker(lambda: os.kill(os.getpid(), signal.SIGKILL))


def loader_worker_died__bus_error() -> None:
    """What Linux does to a process that touches shared memory which /dev/shm has no room for."""
    _read_with_worker(lambda: os.kill(os.getpid(), signal.SIGBUS))


def _read_with_worker(end: Any) -> None:
    from torch.utils.data import DataLoader

    class Ending(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            end()
            return index

    next(iter(DataLoader(Ending(), num_workers=1, multiprocessing_context="fork")))


def too_many_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        with contextlib.ExitStack() as opened:
            while True:
                opened.enter_context(Path(os.devnull).open())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def disk_full__python() -> None:
    with Path("/dev/full").open("w") as file:
        file.write("x" * 100_000)


def disk_full__torch() -> None:
    torch.save(torch.ones(10_000), "/dev/full")


def disk_full__quota() -> None:
    """The system's own message for a used-up quota; this machine has no quota."""
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def host_memory__torch() -> None:
    torch.empty(2**50, dtype=torch.uint8)


def host_memory__numpy() -> None:
    import numpy as np

    np.zeros(2**50, dtype=np.uint8)


def host_memory__system() -> None:
    mmap.mmap(-1, 2**60)


def json_broken__datasets(folder: Path) -> None:
    from datasets import load_dataset

    (folder / "train.jsonl").write_text('{"text": "a"}\n{"text": \n')
    load_dataset("json", data_files=str(folder / "train.jsonl"), cache_dir=str(folder / "cache"))


def json_broken__arrow(folder: Path) -> None:
    from pyarrow import json as arrow

    (folder / "train.jsonl").write_text('{"text": "a"}\n{"text": \n')
    arrow.read_json(folder / "train.jsonl")


def compile_without_compiler(folder: Path) -> None:
    import torch._inductor.config as inductor

    with inductor.patch({"cpp.cxx": (str(folder / "no-compiler"),)}):
        torch.compile(lambda x: x.sin() + 1)(torch.ones(3))


def devices_differ() -> None:
    nn.Linear(2, 2, device="meta")(torch.ones(1, 2))


def meta_tensor() -> None:
    nn.Linear(2, 2, device="meta").to("cpu")
