"""One page that needs no server and no network: a treemap to zoom, the rows, the wastes, and the curve of a step."""

from __future__ import annotations

import json
from typing import Any

from actmem.measure.fold import folded_name

_STYLE = """
:root{color-scheme:light dark;font:15px/1.45 system-ui,sans-serif}body{max-width:72rem;margin:1.5rem auto;padding:0 1rem}
h1{font-size:1.3rem}h2{font-size:1.05rem;margin-top:2rem}svg{width:100%;height:auto;display:block}table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.15rem .6rem;border-bottom:1px solid #8884;font-variant-numeric:tabular-nums}td:first-child,th:first-child{text-align:right}
.scroll{overflow-x:auto}rect{stroke:#fff;cursor:pointer}text{font-size:12px;pointer-events:none;fill:#000}button{font:inherit;margin-right:.3rem}
.axis{font-size:11px;fill:currentColor}
"""
_SCRIPT = """
const data=JSON.parse(document.getElementById('data').textContent);
const colours={activation:'#8ecae6',input:'#a7c957','cast weight':'#f4a261',constant:'#d8d8d8','generator state':'#cdb4db',weight:'#f2cc8f',
gradient:'#e5989b','main gradient':'#d18589','optimizer state':'#ffd6a5','recomputed activation':'#48bfe3',output:'#b5e48c'};
const unit=n=>{for(const u of ['B','KiB','MiB','GiB']){if(n<1024||u==='GiB')return (u==='B'?n:n.toPrecision(4))+' '+u;n/=1024}};
const el=(n,a,t)=>{const e=document.createElementNS('http://www.w3.org/2000/svg',n);for(const k in a)e.setAttribute(k,a[k]);if(t!==undefined)e.textContent=t;return e};
function tree(rows){const root={name:'model',bytes:0,kids:new Map()};
 for(const r of rows){let at=root;at.bytes+=r.bytes;const path=[...(r.module?r.module.split('.'):[]),r.op+(r.argument?' '+r.argument:'')+' '+r.shape.join('×')+' '+r.dtype];
  for(const p of path){if(!at.kids.has(p))at.kids.set(p,{name:p,bytes:0,kids:new Map(),kind:r.kind,up:at});at=at.kids.get(p);at.bytes+=r.bytes}}return root}
function split(items,x,y,w,h,put){if(!items.length)return;if(items.length===1){put(items[0],x,y,w,h);return}
 const total=items.reduce((s,i)=>s+i.bytes,0);let k=1,sum=items[0].bytes;while(k<items.length-1&&sum+items[k].bytes/2<total/2)sum+=items[k++].bytes;
 const part=sum/total;if(w>=h){split(items.slice(0,k),x,y,w*part,h,put);split(items.slice(k),x+w*part,y,w*(1-part),h,put)}
 else{split(items.slice(0,k),x,y,w,h*part,put);split(items.slice(k),x,y+h*part,w,h*(1-part),put)}}
function map(id,rows){const box=document.getElementById(id),root=tree(rows);let here=root;
 const draw=()=>{box.replaceChildren();const trail=[];for(let n=here;n;n=n.up)trail.unshift(n);
  for(const n of trail){const b=document.createElement('button');b.textContent=n.name;b.onclick=()=>{here=n;draw()};box.append(b)}
  const p=document.createElement('span');p.textContent=unit(here.bytes)+' ('+here.bytes.toLocaleString('en')+' B)';box.append(p);
  const svg=el('svg',{viewBox:'0 0 1000 420',role:'img','aria-label':'treemap of '+here.name});
  const kids=[...here.kids.values()].sort((a,b)=>b.bytes-a.bytes);
  split(kids,0,0,1000,420,(n,x,y,w,h)=>{const g=el('g',{});const r=el('rect',{x,y,width:w,height:h,fill:colours[n.kind]||'#ccc'});
   r.append(el('title',{},n.name+': '+n.bytes.toLocaleString('en')+' B, '+n.kind));r.onclick=()=>{if(n.kids.size){here=n;draw()}};g.append(r);
   if(w>60&&h>16){const most=Math.floor(w/7);g.append(el('text',{x:x+4,y:y+14},n.name.slice(0,most)));if(h>32)g.append(el('text',{x:x+4,y:y+29},unit(n.bytes)))}
   svg.append(g)});box.append(svg)};draw()}
function curve(){const box=document.getElementById('curve');if(!box||!data.curve)return;const c=data.curve,most=data.peak_bytes,W=1000,H=240;
 const svg=el('svg',{viewBox:`0 0 ${W} ${H+20}`,role:'img','aria-label':'live bytes after each operation'});
 const at=(i,v)=>[(i/Math.max(1,c.length-1)*W).toFixed(1),(H-v/most*(H-14)).toFixed(1)].join(',');
 const stride=Math.max(1,Math.floor(c.length/2000)),points=[];for(let i=0;i<c.length;i+=stride){let m=i;for(let j=i;j<Math.min(c.length,i+stride);j++)if(c[j]>c[m])m=j;points.push(at(m,c[m]))}
 svg.append(el('polygon',{points:`0,${H} ${points.join(' ')} ${W},${H}`,fill:'#8ecae6',stroke:'#023047'}));
 for(const [name,start] of data.phases){const x=start/Math.max(1,c.length-1)*W;svg.append(el('line',{x1:x,x2:x,y1:0,y2:H,stroke:'#8888'}));svg.append(el('text',{x:x+3,y:H+14,class:'axis'},name))}
 const peak=c.indexOf(most);svg.append(el('text',{x:Math.min(W-190,peak/Math.max(1,c.length-1)*W+4),y:11,class:'axis'},'peak '+unit(most)+', operation '+peak));box.append(svg)}
map('map',data.rows);if(data.peak)map('bill',data.peak);curve();
"""


def page(result: dict[str, Any]) -> str:
    """``result`` of ``record_command.as_dict`` as one HTML page."""
    data = json.dumps(result).replace("<", "\\u003c")
    parts = [
        f"<h1>{_text(result.get('target', 'model'))}: {result['total_bytes']:,} bytes stay for backward</h1>",
        *(f"<p>{_text(note)}</p>" for note in result.get("notes", ())),
        '<h2>By module: click to look inside</h2><div id="map"></div>',
    ]
    if result.get("findings"):
        lines = [[f"{f['bytes']:,}", f["waste"], f["text"]] for f in result["findings"]]
        parts.append("<h2>What could go</h2>" + _table(("bytes", "waste", "change"), lines))
    parts.append("<h2>Rows</h2>" + _rows(result["rows"]))
    parts.append("<h2>By operation</h2>" + _table(("bytes", "operation"), _by_operation(result["rows"])))
    if "peak" in result:
        parts.append(
            f"<h2>One step: {result['peak_bytes']:,} bytes at the peak</h2>"
            + '<div id="curve"></div><div id="bill"></div>'
        )
        parts.append(_rows(result["peak"]))
    body = "".join(parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>What stays for backward</title><style>{_STYLE}</style></head><body>{body}"
        f'<script type="application/json" id="data">{data}</script><script>{_SCRIPT}</script></body></html>'
    )


def _rows(rows: list[dict[str, Any]]) -> str:
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        pattern = ".".join("*" if part.isdigit() else part for part in row["module"].split("."))
        key = (pattern, row["op"], row["argument"], tuple(row["shape"]), row["dtype"], row["bytes"], row["kind"])
        groups.setdefault(key, []).append(row)
    lines = []
    for group in sorted(groups.values(), key=lambda group: -sum(row["bytes"] for row in group)):
        row, count = group[0], f" ×{len(group)}" if len(group) > 1 else ""
        module = folded_name([one["module"] for one in group]) or "root"
        what = [
            row["op"] + (f" {row['argument']}" if row["argument"] else ""),
            "×".join(map(str, row["shape"])),
            row["dtype"],
            row["kind"],
        ]
        lines.append([f"{sum(one['bytes'] for one in group):,}", module + count, *what, row["line"]])
    return _table(("bytes", "module", "operation", "shape", "dtype", "kind", "line"), lines)


def _by_operation(rows: list[dict[str, Any]]) -> list[list[str]]:
    sums: dict[str, int] = {}
    for row in rows:
        sums[row["op"]] = sums.get(row["op"], 0) + row["bytes"]
    return [[f"{size:,}", op] for op, size in sorted(sums.items(), key=lambda item: -item[1])]


def _table(headings: tuple[str, ...], lines: list[list[str]]) -> str:
    head = "".join(f"<th>{_text(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _text(value: object) -> str:
    return str(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
