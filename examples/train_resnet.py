"""Train a small ResNet on images, with MindSpore's recomputation and deep gradient compression.

    python examples/train_resnet.py                  # scikit-learn's digits; four replicas
    python examples/train_resnet.py --dense          # the same with an uncompressed all-reduce
    python examples/train_resnet.py --resume         # continue from the last save
    python examples/train_resnet.py --data PATH      # CIFAR-10: a folder or an original archive

Every residual block except the first of each stage is recomputed in the backward pass. Ends with a
table, and writes figures.json, loss.png and memory.png under --out.
"""

import functools
import pathlib
import zlib

import common
import jax
import numpy as np
import pictures
from cifar import Images, read_cifar
from common import console

import jrc
from jrc.models import resnet


def arguments(argv=None):
    parser = common.parser(__doc__)
    add = parser.add_argument
    add(
        "--data",
        type=pathlib.Path,
        help="CIFAR-10, folder or .tar.gz (none: digits)",
    )
    common.add_options(parser, "runs/resnet", steps=200, batch=32, unit="images")
    add("--depth", type=int, default=14, help="layers: 6 n + 2, such as 8, 14, 20")
    add("--width", type=int, default=16, help="channels of the first stage")
    add("--squeeze-excitation", type=int, help="reduction, such as 8 (none: without)")
    parser.set_defaults(learning_rate=0.1)
    return common.parse(parser, argv)


# ---------------------------------------------------------------- images


def read_digits():
    """Return 1797 grey 8 x 8 images; a fifth, the same in every run, is for testing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit(
            "train_resnet: the digits come with scikit-learn, which is missing: "
            "pip install scikit-learn, or give CIFAR-10 with --data"
        ) from error
    digits = load_digits()
    x = (digits.images[..., None] * 255 / 16).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], digits.target[order].astype(np.int32)
    cut = len(x) // 5
    return Images(x[cut:], y[cut:], x[:cut], y[:cut])


def mean_and_deviation(x):
    """Return mean and deviation of each channel, from the counts of its 256 values."""
    counts = [np.bincount(x[..., i].ravel(), minlength=256) for i in range(x.shape[-1])]
    shares = np.stack(counts, axis=1) / (x.size // x.shape[-1])
    values = np.arange(256.0)[:, None]
    mean = (values * shares).sum(0)
    return mean, np.sqrt(((values - mean[None]) ** 2 * shares).sum(0))


class Source:
    """Images, and their batches with augmentation.

    Digits are shifted by up to one pixel and not mirrored, since a mirrored digit is another one.
    """

    def __init__(self, options):
        self.images = read_cifar(options.data) if options.data else read_digits()
        self.shift, self.mirror = (4, True) if options.data else (1, False)
        self.mean, self.deviation = mean_and_deviation(self.images.train_x)
        self.seed = options.seed

    def normalised(self, x):
        """Return floats; each channel has mean 0 and deviation 1 over the training images."""
        return ((x - self.mean) / self.deviation).astype(np.float32)

    def batch_at(self, step, count):
        """Return the batch of a step; it depends on seed and step alone, in resumed runs too."""
        rng = np.random.default_rng((self.seed, step))
        chosen = rng.integers(0, len(self.images.train_x), count)
        x = augment(self.images.train_x[chosen], rng, self.shift, self.mirror)
        return self.normalised(x), self.images.train_y[chosen]

    def tests(self, most=500):
        """Yield the test images in parts of at most `most`."""
        for start in range(0, len(self.images.test_x), most):
            part = slice(start, start + most)
            yield self.normalised(self.images.test_x[part]), self.images.test_y[part]


def augment(x, rng, shift, mirror):
    """Shift each image by up to `shift` pixels both ways with black borders; mirror half."""
    count, height, width, _ = x.shape
    padded = np.pad(x, ((0, 0), (shift, shift), (shift, shift), (0, 0)))
    top, left = rng.integers(0, 2 * shift + 1, (2, count, 1))
    rows, columns = top + np.arange(height), left + np.arange(width)
    x = padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
    mirrored = rng.random((count, 1, 1, 1)) < 0.5
    return np.where(mirrored, x[:, :, ::-1], x) if mirror else x


# ---------------------------------------------------------------- report


def accuracy(predict, params, model_state, source):
    hits = [predict(params, model_state, x) == y for x, y in source.tests()]
    return float(np.concatenate(hits).mean())


def rerun(config, loss_fn, params, model_state, batch):
    """Return the convolutions and FLOPs that MindSpore's setting recomputes."""
    setting = dict(config.mindspore_segments)
    boundaries = setting.pop("checkpoints")
    cut = jrc.find_segments(loss_fn, boundaries, params, model_state, batch, **setting)
    names = [name for segment in cut.segments for name in segment.rerun]
    return {
        "convolutions": sum(name.startswith("conv_general_dilated") for name in names),
        "flops": sum(segment.rerun_flops for segment in cut.segments),
    }


def show(found):
    again = found["rerun"]
    rows = [
        ("test accuracy before", f"{found['accuracy_before']:.4f}", ""),
        ("test accuracy after", f"{found['accuracy_after']:.4f}", ""),
        ("re-run in the backward pass, per step and replica",
         f"{again['convolutions']} convolutions, {again['flops'] / 1e6:,.1f} MFLOP", ""),
    ]  # fmt: skip
    common.show(found, f"ResNet-{found['settings']['depth']} on {found['data']}", rows)


def plot(found, accuracies, out):
    def losses(axes):
        pictures.smooth(axes, np.asarray(found["losses"]), "training, each step")
        axes.set(ylabel="loss, nats", title="Loss")

    def accuracy(axes):
        test_images = (found["accuracy_before"], found["accuracy_after"])
        values = np.asarray(accuracies)
        pictures.smooth(axes, values, "training, each step", test_images=test_images)
        axes.set(ylabel="accuracy", title="Accuracy")

    title = f"ResNet-{found['settings']['depth']} on {found['data']}, {found['device']}"
    pictures.training(out / "loss.png", title, found, [losses, accuracy])
    pictures.draw(
        out / "memory.png", "Peak of the compiled step", [lambda axes: pictures.peaks(axes, found)],
        (9, 3.4),
    )  # fmt: skip


def run(options):
    source = Source(options)
    devices, mesh = common.devices_and_mesh(options)
    train_x = source.images.train_x
    config = resnet.Config(
        depth=options.depth, classes=10, channels=train_x.shape[-1], width=options.width,
        stem="cifar", squeeze_excitation=options.squeeze_excitation,
    )  # fmt: skip
    wanted = common.settings(options, "data") | {"images_crc32": zlib.crc32(train_x)}
    loss_fn = functools.partial(resnet.loss, config=config)
    # Below the default, because the whole net is small.
    tx = common.optimizer(options, **({} if options.dense else {"min_size": 1024}))
    params, model_state = resnet.init(jax.random.key(options.seed), config)
    size = sum(x.size for x in jax.tree.leaves(params))
    key = jax.random.key(options.seed + 1)
    state = jrc.init_state(params, tx, key, model_state=model_state, mesh=mesh)
    lean = jrc.recompute_segments(loss_fn, **config.mindspore_segments)
    step = jrc.make_train_step(lean, tx, mesh=mesh)
    console.print(
        f"{size:,} parameters, {len(train_x):,} images, {len(devices)} x "
        f"{devices[0].device_kind}, {'dense momentum SGD' if options.dense else 'DGC'}"
    )

    @jax.jit
    def predict(params, model_state, x):
        return resnet.apply(params, model_state, x, config)[0].argmax(-1)

    if options.resume:
        state, history = common.resume(options, state, wanted)
    else:
        before = accuracy(predict, params, model_state, source)
        history = common.start(options, before, wanted)
    batch_of = lambda i: source.batch_at(i, step.replicas * options.batch)  # noqa: E731
    state = common.train(options, step, state, history, batch_of)

    plain = jrc.make_train_step(loss_fn, tx, mesh=mesh)
    memory = common.compare_memory(step, plain, state, batch_of(0))
    own = source.batch_at(0, options.batch)
    after = jax.device_get((state.params, state.model_state))
    results = {
        "data": "CIFAR-10" if options.data else "scikit-learn's digits",
        "accuracy_before": history["before"],
        "accuracy_after": accuracy(predict, *after, source),
        "rerun": rerun(config, loss_fn, params, model_state, own),
    }
    found = common.figures(history, step.replicas, params, memory, results)
    common.write_json(options.out / "figures.json", found)
    plot(found, [s["accuracy"] for s in history["steps"]], options.out)
    show(found)
    console.print(f"Written to {options.out}: figures.json, loss.png, memory.png")
    return found


def main(argv=None):
    return common.main(run, arguments(argv), "train_resnet")


if __name__ == "__main__":
    main()
