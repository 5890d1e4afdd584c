from types import SimpleNamespace

from lightning_diffpipe.callbacks import SaveLora


def test_the_latest_adapters_stay_also_of_a_run_that_goes_on(tmp_path):
    module = SimpleNamespace(save_lora=lambda folder, names, state: folder.mkdir())
    strategy = SimpleNamespace(lightning_module_state_dict=dict)
    others = {"step=000099", "step=000002 good"}  # another run's, and a copy
    for name in others:
        (tmp_path / name).mkdir()
    for steps in (range(7), range(6, 11)):
        callback = SaveLora(tmp_path, every_n_steps=2, keep_last=2)
        callback._last_step = steps[0]
        for step in steps:
            trainer = SimpleNamespace(
                global_step=step, callbacks=[], strategy=strategy, is_global_zero=True
            )
            callback.on_train_batch_end(trainer, module)
            kept = {path.name for path in tmp_path.iterdir()} - others
            latest = list(range(2, step + 1, 2))[-2:]
            assert kept == {f"step={n:06}" for n in latest}
