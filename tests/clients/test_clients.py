"""Real programs train paged models as torch's: `make test-clients`."""

import copy
import sys
from pathlib import Path

import numpy as np
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


def optimized(kind, model, paged_by, **settings):
    """Return an optimizer of torch, or of this library."""
    if paged_by == "w2v.optimizer":
        return w2v.optimizer(model, kind, **settings)
    return getattr(torch.optim, kind)(model.parameters(), **settings)


# SASRec's default loss is a cross-entropy over the whole item table. BPR has rows without a
# gradient in each batch, which Adam in torch moves: Adagrad leaves them alone, here as there.
RECOMMENDERS = {
    "BPR": {"learner": "adagrad", "learning_rate": 0.05, "train_batch_size": 256},
    "SASRec": {
        "train_neg_sample_args": None,
        "train_batch_size": 8192,
        "MAX_ITEM_LIST_LENGTH": 10,
        "n_layers": 1,
        "hidden_size": 16,
        "inner_size": 16,
    },
}


@pytest.mark.parametrize("name", RECOMMENDERS)
def test_recbole_trains_and_scores_recommenders(name, tmp_path, monkeypatch, one_thread):
    pytest.importorskip("recbole")
    # RecBole 1.2.1 reads names that NumPy 2 has no longer.
    for gone, kept in (("float_", "float64"), ("complex_", "complex128"), ("unicode_", "str_")):
        monkeypatch.setattr(np, gone, getattr(np, kept), raising=False)
    monkeypatch.setattr(sys, "argv", ["program"])  # which it reads too
    monkeypatch.chdir(tmp_path)  # where it writes logs
    runs = [recommend(name, tmp_path, paged_by) for paged_by in ("", "w2v.page", "w2v.optimizer")]
    (plain, expected), *others = runs
    assert expected["recall@10"] > 0.01  # than .006 by chance
    for paged, scores in others:
        assert isinstance(paged.item_embedding, w2v.PagedEmbedding)
        assert scores == expected
        assert_equal(plain, paged)


def recommend(name, folder, paged_by):
    """Train on RecBole's part of MovieLens; return model and scores."""
    import recbole
    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation
    from recbole.utils import get_model, get_trainer, init_seed

    settings = RECOMMENDERS[name] | {
        "data_path": str(Path(recbole.__file__).parent / "dataset_example"),
        "checkpoint_dir": str(folder),
        "use_gpu": False,
        "epochs": 1,
        "state": "ERROR",
    }
    config = Config(model=name, dataset="ml-100k", config_dict=settings)
    init_seed(config["seed"], reproducibility=True)
    train, valid, test = data_preparation(config, create_dataset(config))
    model = get_model(name)(config, train.dataset)
    if paged_by:
        w2v.page(model, min_rows=900)
    trainer = get_trainer(config["MODEL_TYPE"], name)(config, model)
    if paged_by == "w2v.optimizer":
        kind = {"adagrad": "Adagrad", "adam": "Adam"}[config["learner"]]
        trainer.optimizer = w2v.optimizer(model, kind, lr=config["learning_rate"])
    trainer.fit(train, valid, show_progress=False)
    # RecBole cannot load its own checkpoints with torch 2.6 and later.
    return model, trainer.evaluate(test, load_best_model=False)


NODES, RELATIONS = 60, 5


def draw_walks(model):
    return model.loader(batch_size=8, shuffle=True)


def draw_triples(model):
    ends = [torch.randint(count, (100,)) for count in (NODES, RELATIONS, NODES)]
    return model.loader(*ends, batch_size=20, shuffle=True)


def draw_ranked_edges(model):
    for _ in range(5):
        yield torch.randint(NODES, (2, 32)), torch.randint(NODES, (2, 32))


def light_gcn(models):
    """Return LightGCN, whose convolutions are of the whole weight."""
    edges = torch.randint(NODES, (2, 300))

    class Ranking(models.LightGCN):
        def loss(self, positive, negative):
            scores = self(edges, torch.cat([positive, negative], dim=1)).view(2, -1)
            nodes = torch.cat([positive, negative]).unique()
            return self.recommendation_loss(*scores, node_id=nodes)

    return Ranking(NODES, DIM, num_layers=2)


def metapath2vec(models):
    authors, venues = torch.randint(20, (100,)), torch.randint(30, (100,))
    path = [("author", "in", "venue"), ("venue", "of", "author")]
    edges = {path[0]: torch.stack([authors, venues]), path[1]: torch.stack([venues, authors])}
    return models.MetaPath2Vec(edges, DIM, path, walk_length=4, context_size=3)


def knowledge_graph(name):
    return lambda models: getattr(models, name)(NODES, RELATIONS, DIM)


GRAPH_MODELS = {
    "LightGCN": ("Adam", light_gcn, draw_ranked_edges),
    "MetaPath2Vec": ("Adagrad", metapath2vec, draw_walks),
    **{
        name: ("Adagrad", knowledge_graph(name), draw_triples)
        for name in ("TransE", "ComplEx", "DistMult", "RotatE")
    },
}


@pytest.mark.parametrize("paged_by", ["w2v.page", "w2v.optimizer"])
@pytest.mark.parametrize("name", GRAPH_MODELS)
def test_torch_geometric_trains_nodes_of_graphs(name, paged_by):
    models = pytest.importorskip("torch_geometric.nn")
    optimizer_name, make, draw = GRAPH_MODELS[name]
    twins_of_it = twins(lambda: nn.ModuleList([make(models)]))
    for outer, way in zip(twins_of_it, ("", paged_by), strict=True):
        (model,) = outer
        torch.manual_seed(1)
        model.reset_parameters()
        first = {key: value.clone() for key, value in outer.state_dict().items()}
        optimizer = optimized(optimizer_name, outer, way, lr=0.05)
        for batch in draw(model):
            optimizer.zero_grad()
            model.loss(*batch).backward()
            optimizer.step()
        assert any((value != first[key]).any() for key, value in outer.state_dict().items())
    assert_equal(*twins_of_it)
