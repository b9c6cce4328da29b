"""The words of charts and tables about moving a KV cache (notebooks 03 and 08), in English and Chinese."""

from __future__ import annotations

WORDS: dict[str, tuple[str, str]] = {
    "mooncake-h800": ("Mooncake, H800", "Mooncake，H800"),
    "mooncake-h20": ("Mooncake, H20", "Mooncake，H20"),
    # roads and how a cache leaves
    "device": ("device to device", "设备间拷贝"),
    "memory": ("shared memory", "共享内存"),
    "network": ("network (loopback)", "网络（回环）"),
    "file": ("file", "文件"),
    "rdma": ("RDMA", "RDMA"),
    "checksums": ("with checksums", "带校验和"),
    "pinned": ("pinned", "锁页内存"),
    "bfloat16": ("as bfloat16", "以bfloat16传输"),
    "whole": ("whole, after prefill", "Prefill后整体转移"),
    "layers": ("layer by layer, while prefill runs", "Prefill进行中逐层转移"),
    # 03_bandwidth
    "bandwidth.title": ("How fast a KV cache moves, by road and size", "KV转移的速度：各种通路与大小"),
    "bandwidth.sub": (
        "points: measured; dashed: t = t0 + bytes ÷ BW fitted to them; dotted: copy bandwidth of this memory",
        "点：实测；虚线：拟合 t = t0 + 字节 ÷ 带宽；点线：内存拷贝带宽",
    ),
    "bandwidth.x": ("bytes moved", "转移的字节数"),
    "bandwidth.y": ("achieved GB/s", "实际速度（GB/s）"),
    "bandwidth.fit": ("{0}: {1} GB/s, t0 {2} ms", "{0}：{1} GB/s，t0 {2} 毫秒"),
    "bandwidth.copy": ("copy at {0} GB/s", "拷贝 {0} GB/s"),
    # 03_timeline
    "timeline.title": ("Prefill and transfer, as the clock saw them", "Prefill与KV转移的真实时间线"),
    "timeline.sub": (
        "one bar a layer, from real timestamps; right: the end of prefill enlarged",
        "每层一条，取自真实时间戳；右：Prefill结束处放大",
    ),
    "timeline.x": ("ms since prefill began", "自Prefill开始的毫秒数"),
    "timeline.zoom": ("around the end of prefill (ms)", "Prefill结束前后（毫秒）"),
    "timeline.exposed": ("exposed {0} ms", "暴露 {0} 毫秒"),
    # 03_hidden
    "hidden.title": ("How much of the transfer hides behind prefill", "KV转移有多少能藏在Prefill之后"),
    "hidden.sub": (
        "layer by layer, {0} layers; line: what transfer time per layer ≤ compute time per layer allows",
        "逐层转移，共{0}层；线：每层转移时间 ≤ 每层计算时间所允许的上限",
    ),
    "hidden.x": ("prompt tokens", "输入token数"),
    "hidden.y": ("share hidden (%)", "隐藏的比例（%）"),
    "hidden.layer": ("time per layer (ms)", "每层耗时（毫秒）"),
    "hidden.compute": ("compute", "计算"),
    "hidden.moved": ("transfer", "转移"),
    "hidden.bound": ("bound", "上限"),
    # 03_links
    "links.title": ("What link would it take to hide the transfer?", "要多快的链路才能隐藏KV转移？"),
    "links.sub": (
        "κ · n ÷ prefill time: above a line the link hides it; hollow: published, dashed: modelled prefill",
        "κ · n ÷ Prefill耗时：链路在线之上即可隐藏；空心：已发表，虚线：由模型估算的Prefill",
    ),
    "links.x": ("prompt tokens", "输入token数"),
    "links.y": ("GB/s needed", "所需速度（GB/s）"),
    # 08_slow_link
    "slow_link.title": ("When does a slow link make separation pointless?", "链路多慢时分离不再划算？"),
    "slow_link.sub": (
        "start of prefill to D's first token; points: measured over the link named, lines: t0 + bytes ÷ BW",
        "从Prefill开始到D的首个token；点：所示链路上实测，线：t0 + 字节 ÷ 带宽",
    ),
    "slow_link.x": ("speed of the link (GB/s)", "链路速度（GB/s）"),
    "slow_link.y": ("time to D's first token (s)", "到D首个token的时间（秒）"),
    "slow_link.none": ("D does the prefill itself", "D自己做Prefill"),
    "slow_link.even": ("pays above {0} GB/s", "高于 {0} GB/s 才划算"),
    "slow_link.never": ("never pays here", "此处从不划算"),
    "loopback": ("loopback", "回环"),
    "10gbit": ("10 Gb/s", "10 Gb/s"),
    "1gbit": ("1 Gb/s", "1 Gb/s"),
    "veth": ("veth pair, as it is", "veth对，不限速"),
    "on loopback": (
        "P and D on this machine's loopback: no network namespaces here, slower links are modelled",
        "P与D经本机回环：此处没有网络命名空间，更慢的链路由模型给出",
    ),
    "in namespaces": (
        "P and D in two network namespaces, veth shaped by tc to {0}",
        "P与D在两个网络命名空间，veth由tc限速为 {0}",
    ),
    "not made": ("; this machine cannot make: {0}", "；本机无法实现：{0}"),
    "1gbit loss=1%": ("1 Gb/s, 1 % loss", "1 Gb/s，丢包1%"),
    # table headers
    "model": ("model", "模型"),
    "shape": ("layers × KV heads × size", "层 × KV头 × 头维"),
    "devices": ("devices", "设备数"),
    "kappa": ("κ (KiB/token)", "κ（KiB/token）"),
    "multi_head": ("if every head had KV (KiB/token)", "若每个头都有KV（KiB/token）"),
    "per_prompt": ("4,096 tokens (GB)", "4096个token（GB）"),
    "travelled": ("really travelled (KiB/token)", "实际转移（KiB/token）"),
    "travelled_ratio": ("travelled ÷ κ", "实际 ÷ κ"),
    "prompt": ("prompt tokens", "输入token数"),
    "cache_gb": ("KV cache (GB)", "KV缓存（GB）"),
    "prefill_ms": ("prefill (ms)", "Prefill（毫秒）"),
    "origin": ("prefill time from", "Prefill耗时来源"),
    "needed": ("needed (GB/s)", "所需（GB/s）"),
    "enough": ("slowest link that hides it", "足以隐藏的最慢链路"),
    "none here": ("none of these", "以上皆不够"),
}
