"""Real programs train paged models as torch's: `make test-clients`."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import w2v

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS, DIM = 50, 8


class Model(nn.Module):
    """A table, a layer and an output that is tied to the table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM)
        self.middle = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, ROWS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.middle(self.table(ids)).tanh())


def batches(count=6):
    """Return ids in batches with every row."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randperm(ROWS, generator=generator) for _ in range(count)]


def twins(make):
    """Return a model of torch, and the same one paged."""
    torch.manual_seed(0)
    plain = make()
    paged = copy.deepcopy(plain)
    w2v.page(paged, min_rows=1)
    return plain, paged


def assert_equal(plain, paged):
    expected = plain.state_dict()
    for name, value in paged.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_lightning_trains_by_its_automatic_optimization():
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, model, optimizer):
            super().__init__()
            self.model, self.make = model, optimizer

        def training_step(self, ids):
            return F.cross_entropy(self.model(ids), ids)

        def configure_optimizers(self):
            optimizer = self.make(self.model)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    plain, paged = twins(Model)
    loader = DataLoader(batches(), batch_size=None)
    for model, make in (
        (plain, lambda model: torch.optim.Adam(model.parameters(), lr=0.01)),
        (paged, lambda model: w2v.optimizer(model, "Adam", lr=0.01)),
    ):
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            gradient_clip_val=0.1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=True,
        )
        trainer.fit(Module(model, make), loader)
    assert_equal(plain, paged)


def test_accelerate_prepares_clips_and_saves(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    plain, paged = twins(Model)
    for model, optimizer in (
        (plain, torch.optim.Adam(plain.parameters(), lr=0.01)),
        (paged, w2v.optimizer(paged, "Adam", lr=0.01)),
    ):
        accelerator = accelerate.Accelerator(cpu=True)
        prepared, optimizer = accelerator.prepare(model, optimizer)
        for ids in batches():
            loss = F.cross_entropy(prepared(ids), ids)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), 0.1)
            optimizer.step()
    assert_equal(plain, paged)


class Texts(torch.utils.data.Dataset):
    """Sequences for a language model."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        ids = torch.randperm(ROWS, generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def language_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": DIM, "n_layer": 1, "n_head": 2, "n_positions": ROWS}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=ROWS, **sizes, **none))


def test_the_trainer_of_transformers_trains_a_tied_gpt2(tmp_path):
    transformers = pytest.importorskip("transformers")
    plain, paged = twins(language_model)
    assert paged.lm_head.weight is paged.transformer.wte.weight
    for model, optimizer in (
        (plain, torch.optim.AdamW(plain.parameters(), lr=0.01)),
        (paged, w2v.optimizer(paged, "AdamW", lr=0.01)),
    ):
        arguments = transformers.TrainingArguments(
            str(tmp_path / "out"),
            per_device_train_batch_size=4,
            num_train_epochs=2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            max_grad_norm=0.1,
        )
        trainer = transformers.Trainer(
            model, arguments, train_dataset=Texts(), optimizers=(optimizer, None)
        )
        trainer.train()
    assert_equal(plain, paged)
    w2v.unpage(paged).save_pretrained(tmp_path / "saved")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_equal(loaded, paged)


def test_transformers_resizes_and_ties_a_paged_table():
    pytest.importorskip("transformers")
    plain, paged = twins(language_model)
    for model in (plain, paged):
        torch.manual_seed(1)
        model.resize_token_embeddings(ROWS + 3)
        model.tie_weights()
    assert paged.lm_head.weight is paged.transformer.wte.weight
    assert_equal(plain, paged)
