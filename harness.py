"""lm-eval 0.4.13, the field's reference harness, on a model of ours: what `eval.py --backend=lm_eval` runs.

The harness reads its tasks, asks the Adapter for log-probabilities and text, and computes the metrics. The Adapter gets
its log-probabilities from eval.py's `score`.
"""

import math

import lm_eval
import numpy as np
import transformers  # noqa: F401 - the harness records its version
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table

from configurator import UserError
from report import progress
from sample import generate
from tasks import cut_to_block

NAMES = {"lambada": "lambada_openai"}  # where the harness has another name for a task


class Adapter(TemplateLM):
    """A model as the harness wants one; TemplateLM encodes pairs of texts. score: the function of eval.py."""

    def __init__(self, model, tokenizer, score, batch_tokens):
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.score = score
        self.batch_tokens = batch_tokens
        self.block_size = model.cfg.block_size

    @property
    def eot_token_id(self):
        return self.tokenizer.eot

    def tok_encode(self, string, add_special_tokens=None, **kw):
        return self.tokenizer.encode(string)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kw):
        """[(sum of log-probabilities, greedy)] of requests [(texts, context ids, scored ids)]."""
        groups = {}  # requests with the same context share it
        for i, (_, context, _) in enumerate(requests):
            groups.setdefault(tuple(context), []).append(i)
        groups = list(groups.values())
        try:
            documents = [[cut_to_block(*requests[i][1:], self.block_size) for i in group] for group in groups]
        except ValueError as e:
            raise UserError(f"a request of the harness: {e}") from None
        results = [None] * len(requests)
        with progress("lm_eval", len(requests), "request", not disable_tqdm) as bar:
            for done in self.score(self.model, documents, self.batch_tokens):
                for (k, j), total, greedy in done:
                    results[groups[k][j]] = (total, greedy)
                bar.update(len(done))
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        parts, owners = [], []
        for i, request in enumerate(requests):
            ids = self.tokenizer.encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.tokenizer.eot, self.block_size, 1):
                parts.append((None, *make_disjoint_window(window)))
                owners.append(i)
        sums = [total for total, _ in self._loglikelihood_tokens(parts, disable_tqdm)]
        return np.bincount(owners, sums, len(requests)).tolist()

    def generate_until(self, requests, disable_tqdm=False):
        texts = []
        with progress("lm_eval", len(requests), "request", not disable_tqdm) as bar:
            for request in requests:
                context, settings = request.args
                settings = normalize_gen_kwargs(settings, min(256, self.block_size // 2))
                n = min(settings["max_gen_toks"], self.block_size - 1)
                ids = self.tokenizer.encode(context) or [self.tokenizer.eot]
                ids = ids[n - self.block_size :]  # so that all new tokens have a place
                temperature = settings.get("temperature", 1.0) if settings["do_sample"] else 0
                rows, *_ = generate(self.model, ids, n, eot=self.tokenizer.eot, temperature=temperature)
                text = self.tokenizer.decode(rows[0])
                for stop in filter(None, settings["until"]):
                    text = text.split(stop)[0]
                texts.append(text)
                bar.update(1)
        return texts


def known_names(tasks):
    """The harness's names of tasks. Raises UserError for those that it does not have."""
    names = [NAMES.get(name, name) for name in tasks]
    manager = TaskManager()
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown:
        raise UserError(f"the harness has no task {', '.join(unknown)}; `lm-eval ls tasks` lists them")
    return names


def results_of(model, names, limit):
    """({task: metrics}, the harness's table) of an Adapter."""
    try:
        found = lm_eval.simple_evaluate(model, tasks=names, limit=limit or None, log_samples=False)
    except OSError as e:  # of the network and the hub too
        raise UserError(f"the harness could not read its data: {str(e).splitlines()[0]}") from None
    results = {}
    for name, record in found["results"].items():
        results[name] = {k: v for k, v in record.items() if not isinstance(v, float) or math.isfinite(v)}
    return results, make_table(found)
