"""Every word a chart or a table shows, in English and Chinese (Prefill and Decode as in the articles)."""

from __future__ import annotations

import unicodedata

from pdlib.spec import one_of
from pdlib.transfer_words import TRANSFER

LANGUAGES = ("en", "zh")

WORDS: dict[str, tuple[str, str]] = {
    # sources, machines, what a caption says
    "measured": ("measured", "本机实测"),
    "recorded": ("recorded", "录制数据"),
    "published": ("published", "文章数据"),
    "modelled": ("modelled", "模型预测"),
    "simulated": ("simulated", "仿真"),
    "this machine": ("this machine", "本机"),
    "article-000": ("article 000", "文章000"),
    "article-001": ("article 001", "文章001"),
    "author-mps": ("author's log (MPS)", "作者日志（MPS）"),
    "author-cuda": ("author's log (CUDA)", "作者日志（CUDA）"),
    "pretrained": ("pretrained weights", "预训练权重"),
    "random": ("random weights", "随机权重"),
    "unknown": ("weights unknown", "权重未知"),
    "kernels": ("kernel {0}", "内核 {0}"),
    "samples": ("n = {0}, median and 95 % interval", "n = {0}，中位数与95%区间"),
    "timed part": ("decode: {0} of {1} steps timed", "Decode：{1}步中计时{0}步"),
    "sample": ("one sample each", "各一个样本"),
    "no rows": ("no rows of this experiment yet", "此实验尚无数据"),
    "article's loop": ("article's loop", "文章的循环"),
    "pdlib": ("pdlib", "pdlib"),
    "article's generate": ("generate()", "generate()"),
    "hand loop": ("author's hand loop", "作者的手写循环"),
    # phases, metrics
    "prefill": ("Prefill", "Prefill"),
    "decode": ("Decode", "Decode"),
    "transfer": ("KV transfer", "KV转移"),
    "total": ("total", "总耗时"),
    "roofline": ("roofline", "屋顶线"),
    "overhead": ("overhead", "额外开销"),
    "physics": ("physics", "物理上限"),
    "throughput": ("throughput (tokens/s)", "吞吐量（tokens/秒）"),
    "seconds": ("time (s)", "耗时（秒）"),
    # 00_roofline
    "roofline.title": (
        "Where Prefill and Decode lie under the roofline",
        "Prefill与Decode在屋顶线图上的位置",
    ),
    "roofline.sub": (
        "{0}, {1}: FLOP/s reached against FLOP per byte moved; numbers are batch sizes",
        "{0}，{1}：实际算力与算术强度的关系；数字为批大小",
    ),
    "roofline.x": ("arithmetic intensity (FLOP/B)", "算术强度（FLOP/B）"),
    "roofline.y": ("compute rate (GFLOP/s)", "算力（GFLOP/s）"),
    "roofline.peak": ("peak {0} GFLOP/s", "峰值 {0} GFLOP/s"),
    "roofline.slope": ("reading at {0} GB/s", "读带宽 {0} GB/s"),
    "roofline.ideal": ("open: where the roofline puts it", "空心：屋顶线给出的位置"),
    "roofline.share": ("{0}: {1}–{2} % of the roof", "{0}：屋顶线的 {1}–{2}%"),
    # 00_mistakes
    "mistakes.title": ("Six ways to fool oneself, and by how much", "六种测量错误，各使结论偏离多少"),
    "mistakes.sub": (
        "mistaken ÷ honest; 1 = the mistake changed nothing. Beside: honest → mistaken",
        "错误测法 ÷ 正确测法；1 表示没有影响。旁注：正确 → 错误",
    ),
    "mistakes.x": ("the verdict moves by this factor", "结论偏离的倍率"),
    "mistakes.less": ("looks faster than it is", "看起来更快"),
    "mistakes.more": ("looks slower than it is", "看起来更慢"),
    "no_warm_up": ("no warm-up", "没有预热"),
    "no_synchronise": ("no synchronise", "没有同步"),
    "fixed_order": ("one run, fixed order", "固定顺序只跑一次"),
    "cache_left": ("cache left in place", "重复之间不清缓存"),
    "all_logits": ("logits of all positions", "保留所有位置的logits"),
    "prefill_in_decode": ("prefill in the decode rate", "Decode速率混入Prefill"),
    "second ÷ first": ("second ÷ first {0}", "第二次 ÷ 第一次 {0}"),
    "yes": ("yes", "是"),
    "no": ("no", "否"),
    "no difference": ("no difference seen", "看不出差别"),
    "times slower": ("looks {0}× slower", "看起来慢 {0} 倍"),
    "times faster": ("looks {0}× faster", "看起来快 {0} 倍"),
    # 01
    "two_phases.title": ("Tokens per second: Prefill against Decode", "PD两阶段吞吐量对比"),
    "two_phases.sub": (
        "log axis; each line carries the ratio of its two phases",
        "对数轴；连线上为两阶段吞吐量之比",
    ),
    "two_phases.roof": ("tick or band: roofline", "竖线或色带：屋顶线"),
    "decomposition.title": (
        "How much of a decode step is physics, and how much is software",
        "Decode一步的耗时：多少是物理上限，多少是软件开销",
    ),
    "decomposition.sub": (
        "GPT-2 decode. The roofline of the articles' Mac is that of an {0}; the chip is not named there",
        "GPT-2 Decode。文章未写明芯片，其屋顶线按 {0} 计算",
    ),
    "decomposition.x": (
        "ms per decode step = roofline + overhead",
        "Decode每步耗时（毫秒）= 屋顶线 + 额外开销",
    ),
    "decomposition.ratio": (
        "Prefill ÷ Decode = physics × overhead",
        "Prefill ÷ Decode = 物理上限 × 额外开销",
    ),
    "ratio_by_batch.title": (
        "140× is one point of a curve: Prefill ÷ Decode over the batch",
        "“140倍”只是曲线上的一点：倍率随批大小变化",
    ),
    "ratio_by_batch.sub": (
        "grey: roofline, overlapping to adding up; dashed: peak × bytes per weight ÷ (2 B × bandwidth)",
        "灰带：屋顶线（重叠至相加）；虚线：峰值 × 每权重字节数 ÷（2B × 带宽）",
    ),
    "ratio_by_batch.x": ("requests in the batch", "批大小（请求数）"),
    "ratio_by_batch.y": ("Prefill ÷ Decode throughput", "Prefill ÷ Decode 吞吐量之比"),
    # 02
    "prefill.title": ("Prefill time in four scenarios and three places", "四种情况下P阶段所消耗时间"),
    "prefill.sub": ("seconds per batch", "每批耗时（秒）"),
    "phases.title": ("Where the time goes, phase by phase", "四种情况下PD各阶段所消耗时间"),
    "phases.sub": (
        "Prefill, KV transfer and Decode end to end; every panel has its own scale",
        "Prefill、KV转移与Decode依次相接；每个小图刻度不同",
    ),
    "equal_decode.title": (
        "What is left of the total ratio when both arms decode alike",
        "两臂Decode耗时相同时，总耗时倍率还剩多少",
    ),
    "equal_decode.sub": (
        "total of all-slow ÷ total of the split; band: with the decode time of the one arm or of the other",
        "总耗时倍率（全慢 ÷ 分离）；色带：取其中一臂的Decode耗时",
    ),
    "equal_decode.x": ("all-slow ÷ split, total time", "总耗时倍率（全慢 ÷ 分离）"),
    "as it is": ("as it is", "原数据"),
    "decode alike": ("decode alike", "Decode相同"),
    "split wins": ("split faster →", "分离更快 →"),
    "slow wins": ("← split slower", "← 分离更慢"),
    "live_pair.title": ("What the split gains, published and live", "分离带来的倍率：文章与实测"),
    "live_pair.sub": (
        "time of all-slow ÷ time of the split; bars: 95 % interval; decode is the same work in both arms",
        "全慢 ÷ 分离的耗时之比；横线：95%区间；两臂的Decode是同样的工作",
    ),
    "live_pair.x": ("all-slow ÷ split", "全慢 ÷ 分离"),
    "puzzle.title": ("Decode after prefill: which habit costs the time?", "同样的Decode，为何快慢不一？"),
    "puzzle.sub": (
        "dots: runs, × the first round; 1 = {0}; article: decode of all-CPU ÷ of the split",
        "每点一次运行，×为第一轮；1 = {0}；文章：全CPU ÷ 分离的Decode耗时",
    ),
    "puzzle.x": ("decode time, relative", "Decode耗时（相对值）"),
    "puzzle.faults": ("page faults per step", "每步缺页次数"),
    "puzzle.step": ("{0} ms/step", "{0} 毫秒/步"),
    "logits=kept": ("logits kept", "保留logits"),
    "logits=dropped": ("logits dropped", "丢弃logits"),
    "kv=views": ("KV as views", "KV为视图"),
    "kv=contiguous": ("KV copied", "KV连续拷贝"),
    "malloc=default": ("default malloc", "默认malloc"),
    "malloc=kept": ("memory kept", "内存不归还"),
    "long": ("long prompt", "长输入"),
    "short": ("short prompt", "短输入"),
    # table headers: the keys are the columns of the CSV
    "scenario": ("scenario", "模式"),
    "phase": ("phase", "阶段"),
    "pd_gpu": ("PD-GPU (s)", "PD-GPU（秒）"),
    "p_gpu_d_cpu": ("P-GPU/D-CPU (s)", "P-GPU/D-CPU（秒）"),
    "pd_cpu": ("PD-CPU (s)", "PD-CPU（秒）"),
    "saved": ("saved by the GPU (s)", "P阶段在GPU比在CPU上节省的时间（秒）"),
    "pd_gpu_total": ("PD-GPU total (s)", "PD-GPU总耗时（秒）"),
    "p_gpu_d_cpu_total": ("P-GPU/D-CPU total with KV transfer (s)", "P-GPU/D-CPU总耗时（含KV转移时间，秒）"),
    "pd_cpu_total": ("PD-CPU total (s)", "PD-CPU总耗时（秒）"),
    "phase_ratio": ("phase ratio", "各阶段倍率"),
    "total_ratio": ("total ratio", "总耗时倍率"),
    "check": ("recomputed", "复算"),
    "check.ok": ("agrees", "一致"),
    "check.bad": ("{0}: {1} rounds to {2}", "{0}：{1} 应舍入为 {2}"),
    "claim": ("claim", "编号"),
    "quantity": ("quantity", "指标"),
    "unit": ("unit", "单位"),
    "article": ("article", "文章"),
    "exact": ("recomputed", "复算"),
    "agrees": ("agrees", "一致"),
    "mistake": ("mistake", "错误"),
    "honest": ("honest (ms)", "正确（毫秒）"),
    "mistaken": ("mistaken (ms)", "错误（毫秒）"),
    "factor": ("mistaken ÷ honest", "错误 ÷ 正确"),
    "verdict": ("verdict", "结论"),
    # quantities of article 001
    "prompt_tokens": ("prompt tokens, 5 × 255", "输入token总数，5 × 255"),
    "new_tokens": ("new tokens, 5 × 256", "输出token总数，5 × 256"),
    "decode_tokens": ("new tokens after the first, 5 × 255", "首个token之后的输出token，5 × 255"),
    "prefill_s": ("Prefill, with the first token", "Prefill耗时（含首个token）"),
    "prefill_tokens_per_s": ("Prefill throughput", "Prefill吞吐量"),
    "decode_s": ("Decode, by subtraction", "Decode耗时（相减得到）"),
    "decode_tokens_per_s": ("Decode throughput", "Decode吞吐量"),
    "total_s": ("both phases", "两阶段总耗时"),
    "decode_share": ("Decode's share of the time", "Decode耗时占比"),
    "ratio": ("Prefill ÷ Decode throughput", "Prefill ÷ Decode 吞吐量之比"),
    "ratio_title": ("the same, in the title", "同上，标题中的数字"),
    **TRANSFER,
}


def say(key: str, lang: str, *values: object) -> str:
    """The text of `key` in `lang`, with {0}, {1} … replaced; InputError for an unknown language."""
    one_of("language", lang, LANGUAGES)
    return WORDS[key][LANGUAGES.index(lang)].format(*values)


def name(key: str, lang: str) -> str:
    """Like `say` where there may be nothing to translate: a key without words stands for itself."""
    return say(key, lang) if key in WORDS else key


def wrapped(lines: list[str], width: int) -> list[str]:
    """Lines of at most `width` columns, broken at blanks; a Chinese character counts as two columns."""
    made = []
    for line in lines:
        now = ""
        for word in line.split(" "):
            if now and _columns(f"{now} {word}") > width:
                made.append(now)
                now = "    " + word
            else:
                now = f"{now} {word}" if now else word
        made.append(now)
    return made


def _columns(text: str) -> int:
    """Width of `text` in columns of a Latin letter."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
